from invfunc._tour import main

if __name__ == "__main__":
    main()
