"""Which rank holds what, and the copies that turn one layout into another."""
