"""Between text and token ids: encoding, chat templates, incremental decoding, stop strings. Torch-free."""
