"""From a bad verdict to something a maintainer can use: minimal case, script, verification."""
