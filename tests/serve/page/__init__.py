"""Tests of the page: a package, so that its fixtures of that scope end with it."""
