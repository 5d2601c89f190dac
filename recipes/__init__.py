"""How what comes with the package was made. In the repository, not in the wheel."""
