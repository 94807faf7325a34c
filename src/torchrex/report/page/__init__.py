"""The report page: one self-contained HTML file from run folders."""

from torchrex.report.page.build import page_of, write_page

__all__ = ["page_of", "write_page"]
