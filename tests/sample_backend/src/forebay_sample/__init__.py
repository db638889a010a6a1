"""A sample backend of Forebay, outside its tree: what a porting team copies and fills with its own device."""
