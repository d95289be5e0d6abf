"""The only door to the operating system: processes, files, clock, facts about the machine."""
