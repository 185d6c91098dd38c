"""The other systems of the paper's tables and some beyond, one file each; docs/peers.md says what each one is."""
