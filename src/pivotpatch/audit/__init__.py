"""Audit: which labels a model gives because of their company."""
