"""A rebase: the series to another release for good, with a person where one must look."""
