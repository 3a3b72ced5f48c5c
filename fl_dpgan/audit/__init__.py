"""Audits: an adversary's lower bound on epsilon beside the ledger's claim, from the data to the released D."""
