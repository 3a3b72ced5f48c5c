"""What is looked at before a site or a server starts: one room a subject, each check gives a finding."""
