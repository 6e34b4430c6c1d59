"""Looking at routes: summaries and checks of streams at rest. Reads, reports, changes nothing."""
