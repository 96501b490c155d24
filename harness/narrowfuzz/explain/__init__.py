"""What a finding needs, and what makes it go away: each change is tried on data of many seeds."""
