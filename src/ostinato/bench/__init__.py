"""`ostinato bench …`: what graphs buy and cost, measured on the user's own model and traffic."""
