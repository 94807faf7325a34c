"""The report page: one self-contained HTML file from run folders."""

from torchrex.report.page.build import Written, page_of, write_page

__all__ = ["Written", "page_of", "write_page"]
