"""How much the tool finds: planted faults hunted by ordinary campaigns, and clean controls."""
