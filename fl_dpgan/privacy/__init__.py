"""The private core: accounting, clipping, per-sample gradients, noise and the ledger. Nothing here knows Flower."""
