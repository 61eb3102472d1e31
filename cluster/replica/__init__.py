"""The process that hosts one worker: its engine, and the gRPC services around it."""
