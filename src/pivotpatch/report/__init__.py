"""A report on a model as one HTML file that needs nothing besides itself."""

from pivotpatch.report.findings import Findings, Subject, gather_findings
from pivotpatch.report.html import write_report

__all__ = ["Findings", "Subject", "gather_findings", "write_report"]
