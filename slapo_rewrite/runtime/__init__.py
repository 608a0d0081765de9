"""Real modules whose used parts are copied into outputs; tested as themselves."""
