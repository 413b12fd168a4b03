"""The store between the stages: the ledger (metadata) and the storage units (arrays)."""
