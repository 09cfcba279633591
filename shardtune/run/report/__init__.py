"""`report.html`: one or several runs on one page that needs no network."""
