"""Types that every compiler pass uses: layouts, placements, ops and their values, op calls, errors."""
