"""The runners, and everything that both of them and their agents share."""
