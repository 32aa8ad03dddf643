"""Plans, forecasts and measurements enter; pictures and pages that can be looked at leave."""
