"""Tables and figures from run folders. Numbers are read from there, never typed."""
