"""The report of a sweep: one page with its answer, figures, trials, privacy, and how to repeat it."""

from dashboards.report.content import Report, report_of
from dashboards.report.page import report_page
from dashboards.report.record import SweepRecord, load_record
from dashboards.report.write import REPORT, write_report

__all__ = ["REPORT", "Report", "SweepRecord", "load_record", "report_of", "report_page", "write_report"]
