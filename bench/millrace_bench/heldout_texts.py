"""Short texts for measuring perplexity, written for this file in the manner of the training data's documentation."""

TEXTS = (
    "A configuration file is read once, when the server starts. Each line holds one setting: a name, an equals "
    "sign and a value. Lines that begin with a number sign are comments and are ignored. If a name occurs twice, "
    "the last value is used. An unknown name is an error, and the server refuses to start, because a misspelled "
    "setting that is silently ignored is harder to find than a message on the first line of the log.",
    "The cache keeps the most recently used pages in memory. When a page is needed and there is no free slot, the "
    "page that has not been used for the longest time is removed. A page that was changed is first written back "
    "to the disk. The size of the cache is given in bytes and can be changed while the program is running, but "
    "making it smaller may take some time, since the pages that no longer fit have to be written first.",
    "To install the package, download the archive and unpack it into an empty directory. Change to that directory "
    "and run the setup script. The script checks that the compiler and the required libraries are present and "
    "prints a list of what is missing. After the build has finished, run the tests before you copy any files. If "
    "a test fails, send the output to the mailing list together with the version of your operating system.",
    "An iterator returns the elements of a collection one after another. It does not copy the collection, so "
    "changing the collection while it is being read leads to undefined results. When there are no more elements, "
    "the iterator raises an exception, and every later call raises the same exception again. Use a list if you "
    "need to read the elements more than once.",
    "A transaction groups several statements into one unit. Either all of the changes become visible to other "
    "sessions or none of them do. If the connection is lost before the transaction has been committed, the "
    "database rolls it back. Long transactions should be avoided, because they keep old versions of the rows from "
    "being removed and may block other sessions that want to change the same rows.",
    "The function returns the number of bytes that were written, which may be smaller than the number of bytes "
    "that were given. This is not an error. The caller should call the function again with the rest of the data. "
    "A return value of zero means that the other side has closed the connection. If an error occurs, the function "
    "returns a negative number and the error code describes the reason.",
    "Branches make it possible to work on several changes at the same time. A new branch starts at the current "
    "commit and does not affect the other branches. When the work is done, the branch is merged. If the same "
    "lines were changed in both branches, the merge stops and the conflicting parts are marked in the files. Edit "
    "the files, remove the marks and commit the result.",
    "The scheduler decides which of the waiting processes runs next. A process with a higher priority runs before "
    "one with a lower priority. Processes with the same priority take turns, and each may run for a short time "
    "before it has to give way to the next. A process that waits for input does not use any processor time. When "
    "the input arrives, the process is put at the end of the queue.",
    "Log files grow without limit unless they are rotated. Rotation renames the current file and opens a new one. "
    "Old files are compressed and removed after a number of days. The program has to be told that the file has "
    "changed, because it otherwise keeps writing to the old one. Most programs open their log files again when "
    "they receive a signal.",
    "A regular expression describes a set of strings. Most characters stand for themselves. A dot matches any "
    "character except a newline, and a star means that the item before it may occur any number of times, "
    "including zero. To match a dot itself, write a backslash before it. Parentheses group items, and the text "
    "that a group matched can be used in the replacement.",
    "If the computer does not start, check the order of the devices in the firmware settings. The disk that holds "
    "the boot loader should come first. Some systems hide disks that were not present when the settings were "
    "saved. In that case, load the default settings, save them and start the computer again. Do not remove the "
    "power cable while the firmware is being updated.",
    "A package depends on other packages when it cannot work without them. The package manager installs these "
    "first. Two packages are in conflict when they cannot be installed at the same time, usually because they "
    "contain the same file. A package that is recommended is installed by default, but it may be removed without "
    "removing the package that recommends it.",
    "The template is compiled when it is used for the first time, and the result is kept until the file changes. "
    "Values are escaped before they are written to the page, so that a name which contains a special character "
    "cannot change the structure of the document. If you are sure that a value is safe, you can mark it, and it "
    "will be written as it is.",
    "Each thread has its own stack, but all threads of a process share the same memory. When two threads change "
    "the same variable, the result depends on the order in which they run. A lock makes sure that only one of "
    "them changes the variable at a time. A thread that wants a lock which is already held has to wait until it "
    "has been released.",
)
