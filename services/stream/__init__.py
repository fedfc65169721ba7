"""The stream process: one bounded relay a request. Knows no scheduling and no prompt's text."""
