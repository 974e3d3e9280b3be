"""What users run to judge a draft head: accept lengths, responses, statistics, the check against its target."""
