"""Where problems to tune come from: shapes files and configs of models."""
