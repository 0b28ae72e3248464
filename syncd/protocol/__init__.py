"""What is on disk: names, records, errors and the policy. Pure: no disk, no clock."""
