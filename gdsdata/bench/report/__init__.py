"""A run's report: tables, report.md and .html, results.json and results.png."""
