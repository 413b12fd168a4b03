"""One decoder for Llama 3, Qwen2.5 and Qwen3, its adapters, its files and its tokenizer."""
