"""`shoal bench`: a load client of any OpenAI API."""
