"""Tests of the SDK; a package, because other folders have files of the same names."""
