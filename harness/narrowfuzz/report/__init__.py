"""What is written about runs, findings, rules and known issues: text, pages and other formats."""
