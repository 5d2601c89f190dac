"""What a server's engine and its clients share, whichever engine it is: plans, profiles, shares."""
