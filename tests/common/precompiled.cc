// The program whose precompiled header the tests share.
int main() { return 0; }
