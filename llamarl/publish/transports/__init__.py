"""How the bytes of a publish travel: one module per transport."""
