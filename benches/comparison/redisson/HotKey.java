import java.io.BufferedOutputStream;
import java.io.PrintStream;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicBoolean;
import org.redisson.Redisson;
import org.redisson.api.RLock;
import org.redisson.api.RedissonClient;
import org.redisson.config.Config;

/** Contenders of one key, each with a client and connections of its own: `src/contender.rs`. */
public class HotKey {
    public static void main(String[] arguments) throws Exception {
        String redis = arguments[0];
        int count = Integer.parseInt(arguments[1]);
        List<RedissonClient> clients = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            Config config = new Config();
            // As few threads and connections as a client can have.
            config.setThreads(2).setNettyThreads(2);
            config.useSingleServer().setAddress(redis)
                .setConnectionMinimumIdleSize(1).setConnectionPoolSize(4)
                .setSubscriptionConnectionMinimumIdleSize(1).setSubscriptionConnectionPoolSize(2);
            clients.add(Redisson.create(config));
        }
        AtomicBoolean isStopped = new AtomicBoolean();
        List<List<long[]>> sections = new ArrayList<>();
        List<Thread> contenders = new ArrayList<>();
        for (RedissonClient client : clients) {
            List<long[]> own = new ArrayList<>();
            sections.add(own);
            Thread contender = new Thread(() -> {
                RLock lock = client.getLock("hot");
                while (!isStopped.get()) {
                    lock.lock();
                    long start = System.nanoTime();
                    long end = System.nanoTime();
                    lock.unlock();
                    own.add(new long[] {start, end});
                }
            });
            contender.start();
            contenders.add(contender);
        }
        // The virtual machine compiles what runs often.
        Thread.sleep(2500);
        System.out.println("ready");
        while (System.in.read() >= 0) {
        }
        isStopped.set(true);
        for (Thread contender : contenders) {
            contender.join(10_000);
        }
        PrintStream output = new PrintStream(new BufferedOutputStream(System.out));
        for (int number = 0; number < count; number++) {
            for (long[] section : sections.get(number)) {
                output.println(number + " " + section[0] + " " + section[1]);
            }
        }
        output.flush();
        Runtime.getRuntime().halt(0);
    }
}
