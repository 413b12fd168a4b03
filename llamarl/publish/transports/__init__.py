"""The transports that carry the bytes of a publish, one module each."""
