"""pivotpatch: multi-label image classification that does not let one object vouch for another."""

__version__ = "0.1.0"
