"""The words that every pass uses: layouts, placements, ops and their values, op calls, errors."""
