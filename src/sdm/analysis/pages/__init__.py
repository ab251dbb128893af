"""Pages: what the paper says, what was measured, and the data to check it.

page = Page("Recall", "SDM keeps 256 pairs apart.", (Finding("recall", ..., "agrees"),))
write_page(page, Path("runs/quick"))  # report.html, figures/NAME.png and .svg, data/NAME.csv
"""

from sdm.analysis.pages.page import Finding, Illustration, Page, Section, Verdict, illustration
from sdm.analysis.pages.write import write_page

__all__ = ["Finding", "Illustration", "Page", "Section", "Verdict", "illustration", "write_page"]
