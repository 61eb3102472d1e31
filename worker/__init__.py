"""One graphpool worker: graph runner, memory, scheduler, sampler, engine. No network in here, and no torch at import."""
