"""Reports about runs, findings, rules and known issues: text, HTML pages and other formats."""
