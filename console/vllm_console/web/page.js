"use strict";
// Keys go to the terminal at once and whenever the window is in front again, without a click into it first.
const focusTerminal = () => document.querySelector(".xterm-helper-textarea")?.focus();
window.addEventListener("load", () => setTimeout(focusTerminal));  // after that of textual.js, which makes it
window.addEventListener("focus", focusTerminal);
