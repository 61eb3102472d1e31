"""Any transformers causal language model on the paged KV pool, through its attention interface."""
