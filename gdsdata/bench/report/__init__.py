"""A run's report: tables on the terminal, report.md and .html, results.json and results.png."""
