"""What a finding takes, and what makes it go away: each asked on data of other seeds."""
