"""Methods to compare with: what a site and the server do in them. They run on the same engine, ledger and wire."""
