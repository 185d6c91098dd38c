"""The other systems of the paper's tables and some beyond, one file each; docs/peers.md says what each one is.

Those that are heads are built by name, `model.head=csra` or `make_head("csra", ...)`, like any other head.
"""
