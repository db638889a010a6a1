"""What is made from a record alone: JUnit XML, a page, the conformance statement; and, apart from them, its verification."""
